"""The fixed patterns' supports, one family a file. Each function is pure in its arguments, generator included."""
