"""What Overspill has of papers: their claims beside what comes out here. Folders are named as those of `overspill`."""
