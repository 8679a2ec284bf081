"""`overspill.train_step`: forward, loss, backward and update as one planned step."""
