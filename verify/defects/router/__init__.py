"""Defects in the path of a request, as patches. Tests have to catch each."""
