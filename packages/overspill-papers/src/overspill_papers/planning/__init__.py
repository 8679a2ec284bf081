"""What the policies of papers share, beside the toolbox of all policies."""
