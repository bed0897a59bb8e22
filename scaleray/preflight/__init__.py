"""What is asked of a cluster before anything is trained on it: judged from measurements, without effects."""
