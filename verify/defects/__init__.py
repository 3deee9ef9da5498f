"""Defects that are put into a copy of the sources. Tests have to catch each."""
