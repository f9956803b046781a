"""The op embedding; `spec` states its contract."""
