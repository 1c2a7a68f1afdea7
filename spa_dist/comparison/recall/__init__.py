"""Task 2: multi-query associative recall, which needs queries and keys that can be told apart."""
