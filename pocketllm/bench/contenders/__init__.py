"""What is measured: our own backends and other engines, behind one interface."""
