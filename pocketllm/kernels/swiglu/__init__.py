"""The op swiglu; `spec` states its contract."""
