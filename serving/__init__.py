"""What the two services have in common as gRPC servers: how they listen, and how they hold a gateway's stream."""
