"""What a worker reports of its training: phases, numbers, metrics of epochs, event files."""
