"""Archive containers: zip files, tar files and directories behind one interface, with limits on
their content.
"""
