"""Code shared by several test files. Test files import from here, never from each other."""
