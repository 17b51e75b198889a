"""The commands, one file each. They parse options and call the library."""
