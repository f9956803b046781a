"""The op sigmoid_gate; `spec` states its contract."""
