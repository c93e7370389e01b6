"""`hocket recommend`."""
