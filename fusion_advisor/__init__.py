"""Profile, fuse, check, keep what pays: the public API."""
