"""The op delta_layer; `spec` states its contract."""
