"""Requirements on a cluster before anything is trained on it: judged from measurements, without effects."""
