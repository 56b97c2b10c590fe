"""Who is next and who gives way: the rules that the control plane and every engine share."""
