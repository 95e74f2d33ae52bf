"""What a worker tells of its training: phases, numbers, metrics of epochs, event files."""
