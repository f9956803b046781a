"""The op paged_attention; `spec` states its contract."""
