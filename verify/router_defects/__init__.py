"""Defects of the way that a request takes, as patches, and that tests catch each."""
