"""Programs that take several launches: one that is cut into smaller ones, with scratch memory between them."""
