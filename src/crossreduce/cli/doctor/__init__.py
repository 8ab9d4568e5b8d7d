"""``crossreduce doctor``: which rank broke a group, as sentences, a table, JSON or a page with a time line."""
