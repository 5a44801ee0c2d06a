"""What do users talk to? Scheduling, step orchestration, OpenAI REST, public gRPC and metrics; never the model itself."""
