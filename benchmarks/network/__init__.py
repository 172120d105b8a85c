"""What the network costs: links, joining, idling, compression, and how soon a lost peer is noticed."""
