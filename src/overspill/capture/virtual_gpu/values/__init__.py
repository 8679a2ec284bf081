"""What a program learns of values that nobody computed: what is known all the same, what is invented, or an error."""
