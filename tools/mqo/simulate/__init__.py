"""Simulate one step of a run: does it fit, and what bounds it?"""
