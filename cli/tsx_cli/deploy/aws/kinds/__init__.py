"""Resources of AWS that every AWS platform uses."""
