"""The op gated_delta_rule; `spec` states its contract."""
