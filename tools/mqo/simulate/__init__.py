"""One step of a run, simulated: does it fit, and what bounds it?"""
