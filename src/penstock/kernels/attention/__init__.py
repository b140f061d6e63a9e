"""Paged attention: one protocol, one reference, one backend per kind of device."""
