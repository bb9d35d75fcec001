"""One file for each migration, named by its number."""
