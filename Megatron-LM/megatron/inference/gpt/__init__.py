"""GPTs that learn from a teacher: how they are built, and their loss."""
