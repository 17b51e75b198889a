"""The commands: one file each, named as its command. They parse options and call the library."""
