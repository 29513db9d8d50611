"""What engine and frontend say to each other: pure data, importable by any process."""
