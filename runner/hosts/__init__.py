"""The hosts of a job, and Ray on them: started or joined, watched and authenticated; doctor and submit."""
