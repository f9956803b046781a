"""The op attention_block; `spec` states its contract."""
