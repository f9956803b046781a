"""The op mlp; `spec` states its contract."""
