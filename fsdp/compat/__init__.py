"""Other libraries' names for what this one does; each is installed by hand, and none by importing this package."""
