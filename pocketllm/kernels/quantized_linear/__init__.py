"""The op quantized_linear; `spec` states its contract."""
