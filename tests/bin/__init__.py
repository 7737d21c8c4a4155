"""A package, since test modules of the same name are in tools and in bin."""
