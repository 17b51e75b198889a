"""A stub of NVIDIA's apex: see the README.md of its folder."""
