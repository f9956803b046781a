"""The op decoder_layer; `spec` states its contract."""
