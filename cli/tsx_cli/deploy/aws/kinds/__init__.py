"""AWS resources that all AWS targets use."""
