"""What train_lm.py is made of: data and settings of both twins, and the training step of each framework."""
