"""What enroot needs and leaves behind: credentials, imported images, hooks, configuration."""
