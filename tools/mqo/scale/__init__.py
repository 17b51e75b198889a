"""What a cell needs at its real size, computed: a layout for so many GPUs, and a GPU's memory."""
