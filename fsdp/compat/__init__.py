"""Other libraries' names for the functions of this library; importing this package does not install them."""
