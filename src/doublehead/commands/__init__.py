"""The commands of the command line, one file each: plain functions whose signatures are their options."""
