"""What layers, the embedding and the head cost a device, read off their traces."""
