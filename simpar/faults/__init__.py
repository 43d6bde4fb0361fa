"""What goes wrong in a cluster while it trains: slow devices and links, noise, late data; descriptions and draws."""
