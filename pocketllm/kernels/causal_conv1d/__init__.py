"""The op causal_conv1d; `spec` states its contract."""
